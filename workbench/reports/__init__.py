"""HTML reports of runs, and the style of all HTML pages."""
