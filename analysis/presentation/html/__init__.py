"""A study's report, or one plot, as a self-contained HTML file.

from analysis.presentation.html import ReportData, report_html
html = report_html(ReportData(info=..., trials=..., ranking=..., ...))
"""

from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.html.page import figure_html, report_html

__all__ = ["ReportData", "figure_html", "report_html"]
