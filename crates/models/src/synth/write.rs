//! From a shape to a file.

use std::io::{self, Write};

use qwen_formats::DType;
use qwen_formats::gguf::{GgufWriter, TensorPlan};

use super::blocks::{self, Random};
use super::mixes::{Mix, fitting};
use super::shapes::{Experts, Latent, RopeScaling, Shape};
use super::vocabulary::{CONTROL, synthetic};

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    /// The output failed.
    #[error("cannot write: {0}")]
    Io(#[from] io::Error),
    /// A shape that no file can have.
    #[error("{tensor}: expected rows of whole blocks of {dtype}, found sizes {shape:?}")]
    Rows {
        /// Tensor.
        tensor: String,
        /// Storage type.
        dtype: DType,
        /// Sizes, outermost first.
        shape: Vec<u64>,
    },
}

/// Writes a checkpoint; `progress` is told of bytes done and in all.
///
/// # Errors
/// If the output can't be written.
pub fn write(
    shape: &Shape,
    mix: &Mix,
    seed: u64,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SynthError> {
    let mut file = File { writer: GgufWriter::new(), shape: *shape, mix: *mix };
    file.keys();
    file.tokenizer();
    file.tensors()?;
    let total = file.writer.tensors().iter().map(|tensor| tensor.bytes).sum();
    let mut random = Random::new(seed.wrapping_add(1));
    let mut done = 0;
    file.writer.write(out, &mut |tensor, out| {
        data(tensor, shape, &mut random, out)?;
        done += tensor.bytes;
        progress(done, total);
        Ok(())
    })?;
    Ok(())
}

/// Bytes that are made at a time.
const PIECE: usize = 1 << 20;

fn data(tensor: &TensorPlan, shape: &Shape, random: &mut Random, out: &mut dyn Write) -> io::Result<()> {
    if tensor.name == "rope_freqs.weight" {
        let values = divisors(shape);
        return out.write_all(&values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>());
    }
    let is_norm = tensor.name.ends_with("norm.weight");
    if is_norm || tensor.shape.len() == 1 {
        let (mean, deviation) = if is_norm { (1.0, 0.05) } else { (0.0, 0.05) };
        let values = (0..tensor.bytes / 4).map(|_| mean + random.value(deviation));
        return out.write_all(&values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>());
    }
    // Products of rows with this spread and values near 1 are near 1.
    let columns = tensor.shape.last().copied().unwrap_or(1).max(1);
    let deviation = 1.0 / (columns as f32).sqrt();
    let block = tensor.dtype.block_bytes();
    let mut piece = vec![0; PIECE / block * block];
    let mut left = usize::try_from(tensor.bytes).unwrap_or(usize::MAX);
    while left > 0 {
        let part = &mut piece[..left.min(PIECE / block * block)];
        blocks::fill(tensor.dtype, part, deviation, random);
        out.write_all(part)?;
        left -= part.len();
    }
    Ok(())
}

/// Llama 3's divisors of the rotary frequencies.
fn divisors(shape: &Shape) -> Vec<f32> {
    const ORIGINAL_CONTEXT: f32 = 8192.0;
    const LOW: f32 = 1.0;
    const HIGH: f32 = 4.0;
    let RopeScaling::Llama3 { factor } = shape.rope_scaling else { return Vec::new() };
    let divisor = |i: u32| {
        let frequency = shape.rope_theta.powf(-(2.0 * i as f32) / shape.head_dim as f32);
        let turns = ORIGINAL_CONTEXT * frequency / std::f32::consts::TAU;
        let smooth = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / factor + smooth)
    };
    (0..shape.head_dim / 2).map(divisor).collect()
}

struct File {
    writer: GgufWriter,
    shape: Shape,
    mix: Mix,
}

impl File {
    fn keys(&mut self) {
        let shape = self.shape;
        let writer = &mut self.writer;
        writer.string("general.architecture", shape.architecture);
        writer.string("general.name", &format!("{} shape, weights by chance", shape.name));
        writer.u32("general.file_type", self.mix.file_type);
        writer.u32("general.quantization_version", 2);
        let key = |name: &str| format!("{}.{name}", shape.architecture);
        writer.u32(&key("block_count"), shape.layers);
        writer.u32(&key("context_length"), shape.context);
        writer.u32(&key("embedding_length"), shape.hidden);
        writer.u32(&key("feed_forward_length"), shape.feed_forward);
        writer.u32(&key("attention.head_count"), shape.heads);
        writer.f32(&key("attention.layer_norm_rms_epsilon"), shape.epsilon);
        writer.f32(&key("rope.freq_base"), shape.rope_theta);
        writer.u32(&key("vocab_size"), shape.vocabulary);
        match shape.latent {
            None => {
                writer.u32(&key("attention.head_count_kv"), shape.kv_heads);
                writer.u32(&key("attention.key_length"), shape.head_dim);
                writer.u32(&key("attention.value_length"), shape.head_dim);
                writer.u32(&key("rope.dimension_count"), shape.head_dim);
            }
            Some(latent) => {
                // The cache has one head: the latent.
                writer.u32(&key("attention.head_count_kv"), 1);
                writer.u32(&key("attention.key_length"), latent.rank + latent.rope_dim);
                writer.u32(&key("attention.value_length"), latent.rank);
                writer.u32(&key("attention.key_length_mla"), latent.nope_dim + latent.rope_dim);
                writer.u32(&key("attention.value_length_mla"), latent.value_dim);
                writer.u32(&key("attention.q_lora_rank"), latent.query_rank);
                writer.u32(&key("attention.kv_lora_rank"), latent.rank);
                writer.u32(&key("rope.dimension_count"), latent.rope_dim);
            }
        }
        if let RopeScaling::Yarn { factor } = shape.rope_scaling {
            writer.string(&key("rope.scaling.type"), "yarn");
            writer.f32(&key("rope.scaling.factor"), factor);
            writer.u32(&key("rope.scaling.original_context_length"), 4096);
            writer.f32(&key("rope.scaling.yarn_log_multiplier"), 0.1);
        }
        if let Some(experts) = shape.experts {
            writer.u32(&key("expert_count"), experts.count);
            writer.u32(&key("expert_used_count"), experts.chosen);
            writer.u32(&key("expert_feed_forward_length"), experts.feed_forward);
            if shape.latent.is_some() {
                writer.u32(&key("expert_shared_count"), experts.shared);
                writer.u32(&key("leading_dense_block_count"), experts.dense_layers);
                writer.f32(&key("expert_weights_scale"), experts.scale);
                writer.bool(&key("expert_weights_norm"), true);
                // Sigmoid.
                writer.u32(&key("expert_gating_func"), 2);
                writer.u32(&key("expert_group_count"), experts.groups.0);
                writer.u32(&key("expert_group_used_count"), experts.groups.1);
            }
        }
    }

    fn tokenizer(&mut self) {
        let vocabulary = synthetic(self.shape.vocabulary as usize);
        let ordinary = vocabulary.tokens.len() - CONTROL.len();
        let types: Vec<i32> = (0..vocabulary.tokens.len()).map(|id| if id < ordinary { 1 } else { 3 }).collect();
        let writer = &mut self.writer;
        writer.string("tokenizer.ggml.model", "gpt2");
        writer.string("tokenizer.ggml.pre", self.shape.pre_tokenizer);
        writer.strings("tokenizer.ggml.tokens", &vocabulary.tokens);
        writer.i32s("tokenizer.ggml.token_type", &types);
        writer.strings("tokenizer.ggml.merges", &vocabulary.merges);
        writer.u32("tokenizer.ggml.bos_token_id", ordinary as u32);
        writer.u32("tokenizer.ggml.eos_token_id", ordinary as u32 + 2);
        writer.u32("tokenizer.ggml.padding_token_id", ordinary as u32);
        writer.bool("tokenizer.ggml.add_bos_token", false);
    }

    fn tensors(&mut self) -> Result<(), SynthError> {
        let shape = self.shape;
        let [hidden, vocabulary] = [shape.hidden, shape.vocabulary].map(u64::from);
        let table = if shape.tied { self.mix.output } else { self.mix.matrix };
        self.matrix("token_embd.weight", table, &[vocabulary, hidden])?;
        if matches!(shape.rope_scaling, RopeScaling::Llama3 { .. }) {
            self.vector("rope_freqs.weight", shape.head_dim / 2)?;
        }
        for layer in 0..shape.layers {
            self.layer(layer)?;
        }
        self.vector("output_norm.weight", shape.hidden)?;
        if !shape.tied {
            self.matrix("output.weight", self.mix.output, &[vocabulary, hidden])?;
        }
        Ok(())
    }

    fn layer(&mut self, layer: u32) -> Result<(), SynthError> {
        let shape = self.shape;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (matrix, sensitive) = (self.mix.matrix, self.mix.of_sensitive(layer, shape.layers));
        let hidden = u64::from(shape.hidden);
        self.vector(&name("attn_norm.weight"), shape.hidden)?;
        match shape.latent {
            Some(latent) => self.latent(layer, &latent)?,
            None => {
                let [queries, keys] = [shape.heads, shape.kv_heads].map(|n| n * shape.head_dim);
                for (part, outputs, dtype) in [("q", queries, matrix), ("k", keys, matrix), ("v", keys, sensitive)] {
                    self.matrix(&name(&format!("attn_{part}.weight")), dtype, &[u64::from(outputs), hidden])?;
                    if shape.architecture == "qwen2" {
                        self.vector(&name(&format!("attn_{part}.bias")), outputs)?;
                    }
                }
                if shape.architecture.starts_with("qwen3") {
                    self.vector(&name("attn_q_norm.weight"), shape.head_dim)?;
                    self.vector(&name("attn_k_norm.weight"), shape.head_dim)?;
                }
                self.matrix(&name("attn_output.weight"), matrix, &[hidden, u64::from(queries)])?;
            }
        }
        self.vector(&name("ffn_norm.weight"), shape.hidden)?;
        match shape.experts.filter(|experts| layer >= experts.dense_layers) {
            Some(experts) => self.experts(layer, &experts),
            None => self.feed_forward(layer, "", None, shape.feed_forward),
        }
    }

    fn latent(&mut self, layer: u32, latent: &Latent) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (matrix, shape) = (self.mix.matrix, self.shape);
        let [hidden, heads, queries, rank] = [shape.hidden, shape.heads, latent.query_rank, latent.rank].map(u64::from);
        let [nope, rope, value] = [latent.nope_dim, latent.rope_dim, latent.value_dim].map(u64::from);
        self.matrix(&name("attn_q_a.weight"), matrix, &[queries, hidden])?;
        self.vector(&name("attn_q_a_norm.weight"), latent.query_rank)?;
        self.matrix(&name("attn_q_b.weight"), matrix, &[heads * (nope + rope), queries])?;
        self.matrix(&name("attn_kv_a_mqa.weight"), matrix, &[rank + rope, hidden])?;
        self.vector(&name("attn_kv_a_norm.weight"), latent.rank)?;
        self.matrix(&name("attn_k_b.weight"), matrix, &[heads, rank, nope])?;
        self.matrix(&name("attn_v_b.weight"), matrix, &[heads, value, rank])?;
        self.matrix(&name("attn_output.weight"), matrix, &[hidden, heads * value])
    }

    fn experts(&mut self, layer: u32, experts: &Experts) -> Result<(), SynthError> {
        let [hidden, count] = [self.shape.hidden, experts.count].map(u64::from);
        self.matrix(&format!("blk.{layer}.ffn_gate_inp.weight"), DType::F32, &[count, hidden])?;
        if self.shape.latent.is_some() {
            self.vector(&format!("blk.{layer}.exp_probs_b.bias"), experts.count)?;
        }
        self.feed_forward(layer, "_exps", Some(count), experts.feed_forward)?;
        match experts.shared {
            0 => Ok(()),
            shared => self.feed_forward(layer, "_shexp", None, shared * experts.feed_forward),
        }
    }

    fn feed_forward(&mut self, layer: u32, suffix: &str, count: Option<u64>, width: u32) -> Result<(), SynthError> {
        let [hidden, width] = [self.shape.hidden, width].map(u64::from);
        let down = self.mix.of_sensitive(layer, self.shape.layers);
        for (part, dtype, rows, columns) in [
            ("gate", self.mix.matrix, width, hidden),
            ("up", self.mix.matrix, width, hidden),
            ("down", down, hidden, width),
        ] {
            let shape: Vec<u64> = count.into_iter().chain([rows, columns]).collect();
            self.matrix(&format!("blk.{layer}.ffn_{part}{suffix}.weight"), dtype, &shape)?;
        }
        Ok(())
    }

    fn matrix(&mut self, name: &str, dtype: DType, shape: &[u64]) -> Result<(), SynthError> {
        let dtype = fitting(dtype, shape.last().copied().unwrap_or(1));
        let fits = self.writer.tensor(name, dtype, shape);
        fits.then_some(()).ok_or_else(|| SynthError::Rows { tensor: name.to_owned(), dtype, shape: shape.to_vec() })
    }

    fn vector(&mut self, name: &str, size: u32) -> Result<(), SynthError> {
        self.matrix(name, DType::F32, &[u64::from(size)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::{TensorIndex, build_graph, read_config};
    use crate::synth::{MIXES, SHAPES};
    use crate::tokenizer::{EncodeOptions, Tokenizer};
    use qwen_formats::Checkpoint;

    /// A shape with the structure of another and sizes that a test can afford.
    fn small(shape: &Shape) -> Shape {
        let experts = shape.experts.map(|experts| Experts { count: 16, chosen: 2, feed_forward: 32, ..experts });
        let latent = shape.latent.map(|latent| Latent { query_rank: 64, rank: 64, nope_dim: 32, ..latent });
        let head_dim = if latent.is_some() { 96 } else { 32 };
        let kv_heads = if latent.is_some() { 4 } else { 2 };
        let small = Shape {
            hidden: 128,
            heads: 4,
            kv_heads,
            head_dim,
            feed_forward: 256,
            vocabulary: 500,
            experts,
            latent,
            ..*shape
        };
        small.with_layers(2)
    }

    #[test]
    fn every_shape_is_a_model_that_is_read() {
        let scratch = tempfile::tempdir().unwrap();
        for shape in &SHAPES {
            let path = scratch.path().join("model.gguf");
            let mut out = Vec::new();
            write(&small(shape), Mix::named("q4_k_m").unwrap(), 1, &mut out, &mut |_, _| {}).unwrap();
            std::fs::write(&path, &out).unwrap();
            let checkpoint = Checkpoint::open(&path).unwrap();
            let config = read_config(&checkpoint).unwrap();
            build_graph(&config, &TensorIndex::from(&checkpoint)).unwrap_or_else(|e| panic!("{}: {e}", shape.name));
        }
    }

    #[test]
    fn every_mix_is_read_and_repeats() {
        let shape = small(&SHAPES[0]);
        for mix in &MIXES {
            let bytes = |seed| {
                let mut out = Vec::new();
                write(&shape, mix, seed, &mut out, &mut |_, _| {}).unwrap();
                out
            };
            let first = bytes(1);
            assert_eq!(first, bytes(1));
            assert_ne!(first, bytes(2));
            qwen_formats::gguf::parse_gguf_bytes(&first).unwrap_or_else(|e| panic!("{}: {e}", mix.name));
        }
    }

    #[test]
    fn text_survives_the_tokenizer() {
        let mut out = Vec::new();
        write(&small(&SHAPES[0]), &MIXES[0], 1, &mut out, &mut |_, _| {}).unwrap();
        let header = qwen_formats::gguf::parse_gguf_bytes(&out).unwrap();
        let tokenizer = Tokenizer::from_gguf(&header.metadata).unwrap();
        let text = "Hello, wörld 世界 123";
        let ids = tokenizer.encode(text, EncodeOptions::LITERAL).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
}
