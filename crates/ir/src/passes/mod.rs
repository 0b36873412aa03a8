//! Passes: graph in, graph and report out, no hidden state. One file each, in the order in which they run.
