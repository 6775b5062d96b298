"""SGLang servers. SGLang is launched as a process and called over HTTP, never imported here, except by the plugins
in `exact` and `sync`."""
