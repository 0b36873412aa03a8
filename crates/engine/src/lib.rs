//! Sequences, batches, sampling: turns a runtime that computes logits into one that generates text.
