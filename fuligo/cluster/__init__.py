"""A run on a Ray cluster: where its processes go, and thin actors that hold them. The only package that imports ray."""
