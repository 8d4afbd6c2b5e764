"""Publishing a model: checks of its files, the proof that it loads anywhere, its card, the upload."""
