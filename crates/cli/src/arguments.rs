//! Arguments that several commands share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use qwen_engine::MAX_CROSSINGS;
use serde::Serialize;

use crate::error::CliError;
use crate::plugins::{DeviceList, Group};

/// Which model.
#[derive(Debug, Clone, Args)]
pub struct ModelArgument {
    /// A GGUF file, a directory in Hugging Face layout, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or `smollm2`
    #[arg(long, short, value_name = "MODEL", default_value = "smollm2")]
    pub model: String,
}

/// How exactly numbers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 8-bit activations for quantised weights: quickest
    Fast,
    /// 8-bit activations for quantised weights, in two terms where one would show
    Balanced,
    /// float32 throughout
    Exact,
}

impl Precision {
    /// Name as in the argument.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Balanced => "balanced",
            Self::Exact => "exact",
        }
    }
}

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvCacheDtype {
    /// What suits the precision: float32 where it is exact, bfloat16 otherwise
    Auto,
    /// float32
    F32,
    /// float16
    F16,
    /// bfloat16
    Bf16,
}

/// Where the model runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Runtime")]
pub struct DeviceArguments {
    /// Device to compute on, as `qwen devices` lists them: cpu, a plugin's such as opencl:0 or sim:mlu370:0, or auto; of
    /// qwen-server several, as sim:mlu370:0,1+cpu
    #[arg(long, value_name = "NAME[:MODEL][:N]", default_value = "cpu")]
    pub device: DeviceList,
    /// Devices that compute every layer together, each a part of it, by a plugin with collectives; of qwen-server each N of the
    /// devices are such a group
    #[arg(long, alias = "tensor_parallel_size", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tensor_parallel_size: u32,
    /// Stages that the layers are divided into, each with a device of its own or with as many as --tensor-parallel-size says: a
    /// group has the product of the two
    #[arg(long, alias = "pipeline_parallel_size", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub pipeline_parallel_size: u32,
    /// A plugin's library, beside those of the usual places (may be repeated)
    #[arg(long = "plugin", value_name = "FILE")]
    pub plugins: Vec<PathBuf>,
    /// Most values that a step may copy between the device and the CPU, which computes what the device refuses
    #[arg(long, value_name = "N", default_value_t = MAX_CROSSINGS)]
    pub max_crossings: u32,
    /// Threads to compute with [default: all that the process may use, or QWEN_THREADS]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
}

impl DeviceArguments {
    /// The devices in groups that compute one model together, in the order in which they are named.
    ///
    /// # Errors
    /// If they can't be divided so, or one is named twice.
    pub fn groups(&self) -> Result<Vec<Group>, CliError> {
        self.device.groups(self.tensor_parallel_size, self.pipeline_parallel_size)
    }
}

/// How the model runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Runtime")]
pub struct RuntimeArguments {
    /// Device, plugins, threads.
    #[command(flatten)]
    pub place: DeviceArguments,
    /// How exactly numbers are computed
    #[arg(long, value_enum, default_value_t = Precision::Balanced)]
    pub precision: Precision,
    /// How keys and values are stored
    #[arg(long, value_enum, default_value_t = KvCacheDtype::Auto)]
    pub kv_cache_dtype: KvCacheDtype,
    /// Longest context in tokens, prompt and answer together [default: the model's own, at most 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_seq_len: Option<u32>,
    /// Most prompt tokens that are computed in one step
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill_chunk_size: u32,
}

/// How tokens are chosen. What is not given comes from the command's own defaults.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArguments {
    /// 0 = always the most probable token; higher = more varied
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = |text: &str| number(text, 0.0, 100.0))]
    pub temperature: Option<f32>,
    /// Choose among the N most probable tokens, 0 = all
    #[arg(long, value_name = "N")]
    pub top_k: Option<u32>,
    /// Choose among the most probable tokens that together reach this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = |text: &str| number(text, 1e-6, 1.0))]
    pub top_p: Option<f32>,
    /// Choose among tokens at least this probable relative to the most probable one
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = |text: &str| number(text, 0.0, 1.0))]
    pub min_p: Option<f32>,
    /// Make tokens that occurred less probable by this factor, 1 = off
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = |text: &str| number(text, 0.01, 100.0))]
    pub repetition_penalty: Option<f32>,
    /// Taken from a token's logit for each time it occurred in the answer
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = |text: &str| number(text, -100.0, 100.0))]
    pub frequency_penalty: Option<f32>,
    /// Taken from a token's logit once it occurred in the answer
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = |text: &str| number(text, -100.0, 100.0))]
    pub presence_penalty: Option<f32>,
    /// Seed of the random numbers: the same seed gives the same answer
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// End the answer at this text, which is cut off (may be repeated)
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on after the token that ends a text
    #[arg(long)]
    pub ignore_eos: bool,
}

/// A number within bounds, for the arguments' parser.
fn number(text: &str, low: f32, high: f32) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number >= low && number <= high => Ok(number),
        _ => Err(format!("expected a number from {low} to {high}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_bounds() {
        assert_eq!(number("0.5", 0.0, 1.0), Ok(0.5));
        assert_eq!(number("-1", -1.0, 1.0), Ok(-1.0));
        for wrong in ["1.5", "-0.1", "NaN", "inf", "", "a"] {
            assert_eq!(number(wrong, 0.0, 1.0).unwrap_err(), "expected a number from 0 to 1");
        }
    }
}
