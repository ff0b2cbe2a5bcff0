"""Programs that use the package as users do."""
