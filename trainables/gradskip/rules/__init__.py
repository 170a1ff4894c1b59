"""Stop rules: pure state machines that decide which layer stops when."""
