"""Reports for readers: summary text, tables, figures and the HTML page."""
