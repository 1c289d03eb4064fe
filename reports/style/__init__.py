"""The look of figures: colours, labels, series."""
