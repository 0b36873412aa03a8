//! Model file formats: GGUF and safetensors containers, quantised block formats. Hostile bytes in, typed views out.
