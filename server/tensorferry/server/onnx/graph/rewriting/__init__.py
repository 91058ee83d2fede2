"""Rewriting of graphs, so that axis 0 of each input and output counts rows."""
