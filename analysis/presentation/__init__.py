"""Everything that presents: text, figures, HTML, PNG, tree picture, comparison, export."""
