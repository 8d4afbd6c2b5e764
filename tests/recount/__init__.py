"""Every figure of records, logs, reports and cards computed again, with plain transformers and numpy.

Nothing here uses the package's arithmetic: it makes the folders (`models.py`), and the rest reads them.
"""
