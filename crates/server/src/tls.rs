//! HTTPS: certificates and key from PEM files.

use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// Files that can't be used for HTTPS.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {problem}")]
pub struct TlsError {
    /// Which.
    file: String,
    /// What is wrong.
    problem: String,
}

fn wrong(file: &Path) -> impl Fn(String) -> TlsError + '_ {
    move |problem| TlsError { file: file.display().to_string(), problem }
}

pub(crate) fn acceptor(certificates: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let bad = wrong(certificates);
    let chain: Vec<CertificateDer<'static>> =
        CertificateDer::pem_file_iter(certificates)
            .and_then(Iterator::collect)
            .map_err(|error| bad(format!("expected certificates in PEM form: {error}")))?;
    if chain.is_empty() {
        return Err(bad("expected certificates in PEM form, found none".into()));
    }
    let private = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| wrong(key)(format!("expected a private key in PEM form: {error}")))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private))
        .map_err(|error| bad(format!("certificate and key can't be used: {error}")))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
