//! From a request to something that the engine can queue: everything that can be done before it takes anybody else's time, on
//! the thread of whoever asks.

use std::sync::{Arc, OnceLock};

use crate::constraint::GrammarCompiler;
use crate::sequence::{Facts, Sequence};
use crate::{EngineError, Limits, Request};

/// Checks requests and makes them ready, on any thread; clones share what they know.
#[derive(Debug, Clone)]
pub struct Preparer {
    pub(crate) limits: Limits,
    pub(crate) facts: Arc<Facts>,
    /// Made when the first grammar comes: few models ever see one.
    pub(crate) compiler: Arc<OnceLock<Result<GrammarCompiler, String>>>,
}

/// A request that was checked, with its grammar compiled.
#[derive(Debug)]
pub struct Prepared {
    pub(crate) sequence: Box<Sequence>,
}

impl Preparer {
    pub(crate) fn new(limits: Limits, facts: Arc<Facts>) -> Self {
        Self { limits, facts, compiler: Arc::default() }
    }

    /// Checks a request and compiles its grammar.
    ///
    /// # Errors
    /// If a parameter or token is out of range, the grammar is refused, or the request could never be computed; and if too many
    /// grammars are being compiled.
    pub fn prepare(&self, request: Request) -> Result<Prepared, EngineError> {
        self.limits.check(&request)?;
        let constraint = match &request.constraint {
            Some(constraint) => {
                Some(Box::new(self.compiler()?.compile(constraint, request.client, request.deadline)?))
            }
            None => None,
        };
        let max_len = self.limits.most_tokens(&request);
        let sequence = Box::new(Sequence::new(request, max_len, constraint, &self.facts)?);
        Ok(Prepared { sequence })
    }

    /// Sorts the vocabulary for grammars, which the first grammar would wait for otherwise.
    ///
    /// # Errors
    /// If the model has no tokenizer or no token that ends an answer.
    pub fn warm_up_grammars(&self) -> Result<(), EngineError> {
        self.compiler().map(|_| ())
    }

    fn compiler(&self) -> Result<&GrammarCompiler, EngineError> {
        let make = || {
            let tokenizer = self.facts.tokenizer.clone().ok_or("the model has no tokenizer")?;
            GrammarCompiler::new(tokenizer, self.limits.vocab_size, &self.facts.eos).map_err(|error| error.to_string())
        };
        let made = self.compiler.get_or_init(make);
        made.as_ref().map_err(|reason| EngineError::Grammar { reason: reason.clone() })
    }
}
