"""SGLang servers, as processes. Nothing here imports sglang: it is launched, and talked to over HTTP."""
