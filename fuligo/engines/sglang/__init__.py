"""SGLang servers. SGLang runs in its own processes and is called over HTTP; only the plugins in subfolders, which it loads, import it."""
