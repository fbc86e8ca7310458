"""Old module paths, kept so that older scripts run with only the package name changed."""
