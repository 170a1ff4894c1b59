"""Gradient-Skip in trainers of other libraries, each in a module that alone imports its library."""
