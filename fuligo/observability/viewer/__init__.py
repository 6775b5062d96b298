"""`fuligo view`: a local page over run directories, live or finished. It reads their files as they grow and writes nothing."""
