"""Traces read back: figures, tables, plots, a page and a notebook."""
