//! Rotary embeddings: scaling rules in, a table of inverse frequencies and two factors out.
//!
//! Tables are f32 and follow the order of operations of the transformers library, so that they agree with the tables that
//! models were trained with; powers are rounded once, from f64.

use std::f64::consts::{PI, TAU};

use qwen_ir::RopeStyle;

/// Rotary embedding of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated elements of a head.
    pub rotary_dim: u32,
    /// Pairing, which depends on how the checkpoint orders the rows of query and key.
    pub style: RopeStyle,
    /// How frequencies are stretched for contexts beyond the pre-trained one.
    pub scaling: RopeScaling,
    /// Numbers that the frequencies are divided by, stored in some GGUF files instead of a rule.
    pub divisors: Option<Vec<f32>>,
}

/// How frequencies are stretched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All alike.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Low frequencies only, with a smooth passage (Llama 3.1).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Turns within the original context below which a frequency is low.
        low_freq_factor: f64,
        /// Turns within the original context above which a frequency is high.
        high_freq_factor: f64,
        /// Pre-trained context.
        original_max_position_embeddings: u32,
    },
    /// Low frequencies, and the attention is sharpened.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Pre-trained context.
        original_max_position_embeddings: u32,
        /// Turns within the original context above which a frequency is kept.
        beta_fast: f64,
        /// Turns within the original context below which a frequency is divided.
        beta_slow: f64,
        /// Bounds of the passage are rounded to whole frequencies.
        truncate: bool,
        /// Factor on cos and sin.
        attention_factor: f64,
        /// Latent attention: rule of the factor on the softmax scale, 0 = none.
        mscale_all_dim: f64,
    },
}

/// 0.1 m ln(factor) + 1.
pub(super) fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl RopeConfig {
    /// One inverse frequency per pair.
    #[must_use]
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let dim = self.rotary_dim as f32;
        let base = f64::from(self.theta as f32);
        let periods = (0..self.rotary_dim / 2).map(|i| base.powf(f64::from((2 * i) as f32 / dim)) as f32);
        let mut table: Vec<f32> = match self.scaling {
            RopeScaling::None => periods.map(f32::recip).collect(),
            RopeScaling::Linear { factor } => periods.map(|period| period.recip() / factor as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings,
            } => {
                let context = f64::from(original_max_position_embeddings);
                periods.map(|period| llama3(period.recip(), factor, low, high, context)).collect()
            }
            RopeScaling::Yarn { factor, .. } => {
                let (low, high) = self.yarn_range();
                let (low, high) = (low as f32, (high - low) as f32);
                let ramp = move |i: usize| ((i as f32 - low) / high).clamp(0.0, 1.0);
                periods
                    .enumerate()
                    .map(|(i, period)| {
                        let kept = 1.0 - ramp(i);
                        (factor as f32 * period).recip() * (1.0 - kept) + period.recip() * kept
                    })
                    .collect()
            }
        };
        if let Some(divisors) = &self.divisors {
            table.iter_mut().zip(divisors).for_each(|(value, divisor)| *value /= divisor);
        }
        table
    }

    /// First divided and first kept frequency of YaRN, as positions in the table.
    fn yarn_range(&self) -> (f64, f64) {
        let RopeScaling::Yarn { original_max_position_embeddings, beta_fast, beta_slow, truncate, .. } = self.scaling
        else {
            return (0.0, 0.001);
        };
        let dim = f64::from(self.rotary_dim);
        let context = f64::from(original_max_position_embeddings);
        let place = |turns: f64| dim * (context / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
        let (low, high) = (place(beta_fast), place(beta_slow));
        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        // Equal bounds are a step, not a division by zero.
        if low == high { (low, high + 0.001) } else { (low, high) }
    }

    /// Factor on cos and sin.
    #[must_use]
    pub const fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }

    /// Factor on the softmax scale of latent attention.
    #[must_use]
    pub fn softmax_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { factor, mscale_all_dim, .. } if mscale_all_dim != 0.0 => {
                yarn_mscale(factor, mscale_all_dim).powi(2)
            }
            _ => 1.0,
        }
    }
}

fn llama3(frequency: f32, factor: f64, low: f64, high: f64, context: f64) -> f32 {
    let wavelength = frequency.recip() * TAU as f32;
    if wavelength > (context / low) as f32 {
        frequency / factor as f32
    } else if wavelength < (context / high) as f32 {
        frequency
    } else {
        let smooth = (wavelength.recip() * context as f32 - low as f32) / (high - low) as f32;
        (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
    }
}
