"""Reading from disk: studies, journals, Ray experiments, and the layout of a study's folder."""
