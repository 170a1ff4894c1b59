"""Search over distinct outcomes of settings, whose savings are known before they are trained."""
