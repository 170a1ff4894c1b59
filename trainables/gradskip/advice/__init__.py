"""What Gradient-Skip tells its user: warnings, and why a run can stop or has stopped nothing."""
