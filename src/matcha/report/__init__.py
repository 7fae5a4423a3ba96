"""Reports: records and plans become tables, figures and one self-contained page."""

from matcha.report.page import load_runs, write_report
from matcha.report.rows import Summary
from matcha.report.summary import Comparison, compare

__all__ = ["Comparison", "Summary", "compare", "load_runs", "write_report"]
