"""`tilewright verify`: what a patched transformers model computes, against float64."""
