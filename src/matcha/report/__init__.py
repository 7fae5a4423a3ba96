"""Reports: records and plans become tables, figures and one self-contained page."""

from matcha.report.comparison import Comparison, compare
from matcha.report.page import load_runs, write_report
from matcha.report.verdict import Summary

__all__ = ["Comparison", "Summary", "compare", "load_runs", "write_report"]
