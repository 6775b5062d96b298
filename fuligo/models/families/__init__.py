"""Model families, one per module: shapes and weight names from config.json."""
