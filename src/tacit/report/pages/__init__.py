"""HTML: the sections of a page, and the page."""
