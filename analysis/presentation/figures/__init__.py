"""The numbers of the report's plots. Pure: frames in, plain values out."""
