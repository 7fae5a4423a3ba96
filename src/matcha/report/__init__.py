"""Reports: records and plans become tables, figures and one self-contained page."""
