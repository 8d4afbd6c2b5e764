"""The report as one HTML file that needs nothing else: no script, no network, no font of its own."""
