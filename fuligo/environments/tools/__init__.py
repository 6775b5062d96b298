"""Tools to start with: a Python interpreter in a sandbox, and search over local documents."""
