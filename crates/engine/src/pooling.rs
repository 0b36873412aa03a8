//! From hidden states to one vector of a text.
//!
//! In: hidden states after the final norm, row by row in order of position; a text that is computed again after it gave way
//! offers rows a second time. Out: a vector of the model's hidden size. Each row counts once and sums are made in order of
//! position, so the vector has the same bits however the text was cut into steps.

/// How hidden states become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pooling {
    /// That of the last token, the only one that has seen the whole text in a decoder.
    #[default]
    Last,
    /// The mean over all tokens.
    Mean,
}

/// A vector as far as it is known.
#[derive(Debug)]
pub(crate) struct Pooled {
    pub(crate) pooling: Pooling,
    sums: Vec<f64>,
    /// Rows that were taken.
    rows: usize,
}

impl Pooled {
    pub(crate) const fn new(pooling: Pooling) -> Self {
        Self { pooling, sums: Vec::new(), rows: 0 }
    }

    /// Takes the row of a position.
    pub(crate) fn take(&mut self, position: usize, row: &[f32]) {
        let values = row.iter().map(|value| f64::from(*value));
        match self.pooling {
            Pooling::Last => self.sums = values.collect(),
            Pooling::Mean if position == self.rows => {
                self.rows += 1;
                self.sums.resize(row.len(), 0.0);
                self.sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            // Known from before.
            Pooling::Mean => {}
        }
    }

    pub(crate) fn finish(self) -> Vec<f32> {
        let count = self.rows.max(1) as f64;
        self.sums.into_iter().map(|sum| (sum / count) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_count_once() {
        let rows = [[1.0_f32, 2.0], [3.0, -2.0], [5.0, 3.0]];
        let pooled = |pooling, order: &[usize]| {
            let mut pooled = Pooled::new(pooling);
            order.iter().for_each(|at| pooled.take(*at, &rows[*at]));
            pooled.finish()
        };
        assert_eq!(pooled(Pooling::Mean, &[0, 1, 2]), [3.0, 1.0]);
        assert_eq!(pooled(Pooling::Mean, &[0, 1, 0, 1, 2]), [3.0, 1.0]);
        assert_eq!(pooled(Pooling::Last, &[2]), [5.0, 3.0]);
    }
}
