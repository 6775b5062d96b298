"""`fuligo view`: a local page over run directories, live or finished. Reads their files as they grow; writes nothing."""
