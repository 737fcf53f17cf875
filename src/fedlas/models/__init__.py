"""Networks, and what makes any network fit for a loss that looks at features."""
