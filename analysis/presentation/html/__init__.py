"""A study's report as one self-contained HTML file, and its plots as PNG for papers.

from analysis.presentation.html import ReportData, report_html, write_pngs
html = report_html(ReportData(info=..., trials=..., ranking=..., ...))
"""

from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.figures.variance import variance_frames
from analysis.presentation.html.page import report_html
from analysis.presentation.png.matplotlib_figures import write_pngs

__all__ = ["ReportData", "report_html", "write_pngs", "variance_frames"]
