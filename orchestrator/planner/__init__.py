"""What fits into a GPU's memory: pure arithmetic, apart from the drawing in `chart.py`."""
