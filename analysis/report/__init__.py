"""A study's report: one self-contained HTML file to look at, and its plots as PNG for papers.

from analysis.report import ReportData, report_html, write_pngs
html = report_html(ReportData(info=..., trials=..., ranking=..., ...))
"""

from analysis.report.data import ReportData
from analysis.report.matplotlib_figures import write_pngs
from analysis.report.page import report_html
from analysis.report.variance import variance_frames

__all__ = ["ReportData", "report_html", "write_pngs", "variance_frames"]
