"""Models: one decoder whose settings describe several published families, and models of transformers."""
