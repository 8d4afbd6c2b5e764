"""Sentences about a model, each made of typed record fields by one function.

Cards, reports, logs and the last lines of commands print these sentences. A function returns None where the records do
not support its sentence. Text that only the card has is in its template, `moh_llm/hub/templates/card.md`.
"""
