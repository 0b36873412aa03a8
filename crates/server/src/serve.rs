//! A server's life: listen, load, warm up, answer, drain, stop.
//!
//! It listens before the model is loaded, so that health checks have an answer from the start. HTTP/1.1 only, with or without
//! TLS: streams need nothing else, and every timeout of it is known.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::gate::LocalAddress;
use crate::life::State;
use crate::tls::{TlsError, acceptor};
use crate::trace::Tracing;
use crate::{Config, Keys, ServedModel, Server, router, warmup};

/// Time for the last bytes of responses when everything else has ended.
const LINGER: Duration = Duration::from_secs(2);

/// Why a server ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address can't be listened on.
    #[error("cannot listen on {address}: {source}; choose another with --host and --port")]
    Listen {
        /// Address.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// Certificates or key.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Where spans should go is no URL; what it is instead is not told, as it may hold a password.
    #[error(
        "cannot send spans: otlp_endpoint: expected a URL such as http://127.0.0.1:4318, found another text; mend the setting"
    )]
    Traces,
    /// The SDK's exporter of spans can't be made.
    #[error("cannot send spans: {0}; mend the variables OTEL_EXPORTER_OTLP_*, or leave otlp_endpoint out")]
    Exporter(String),
    /// The system has no signals for us.
    #[error("cannot watch for signals: {0}")]
    Signal(std::io::Error),
    /// The model can't be loaded.
    #[error("{0}")]
    Load(String),
    /// The model can't compute its first tokens.
    #[error("the warm-up failed: {0}; --warmup=false starts without it")]
    Warmup(String),
}

/// Loads the model, on a thread of its own.
pub type Loading = Box<dyn FnOnce() -> Result<ServedModel, String> + Send>;

/// What a server tells while it starts.
#[derive(Debug, Clone, Copy)]
pub enum Stage {
    /// It listens here.
    Listening(SocketAddr),
    /// It answers, so long after it began.
    Ready(SocketAddr, Duration),
    /// It finishes what it has.
    Draining(usize),
}

/// Runs a server until a signal (SIGTERM or SIGINT) ends it.
///
/// # Errors
/// If it can't start.
pub async fn serve(
    config: Config,
    keys: Keys,
    load: Loading,
    mut tell: impl FnMut(Stage) + Send,
) -> Result<(), ServeError> {
    let begun = Instant::now();
    let tls = config.tls.as_ref().map(|(certificates, key)| acceptor(certificates, key)).transpose()?;
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::Signal)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::Signal)?;
    let address = config.address;
    let listener = TcpListener::bind(address).await.map_err(|source| ServeError::Listen { address, source })?;
    let address = listener.local_addr().map_err(|source| ServeError::Listen { address, source })?;
    tell(Stage::Listening(address));
    let tracing = Tracing::new(config.otlp_endpoint.as_deref())?;
    let server = Arc::new(Server::new(config, keys, tracing));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let accepting = tokio::spawn(accept(Arc::clone(&server), listener, tls, stopped));
    let started = tokio::select! {
        started = start(&server, load) => started.map(|()| true),
        () = either(&mut terminate, &mut interrupt) => Ok(false),
    };
    let result = match started {
        Ok(true) => {
            tell(Stage::Ready(address, begun.elapsed()));
            either(&mut terminate, &mut interrupt).await;
            tell(Stage::Draining(server.life.active()));
            drain(&server, &mut terminate, &mut interrupt).await;
            Ok(())
        }
        Ok(false) => Ok(()),
        Err(error) => Err(error),
    };
    // Fails only if the acceptor has ended already.
    let _ = stop.send(());
    let _ = tokio::time::timeout(LINGER, accepting).await;
    server.tracing.finish().await;
    result
}

async fn either(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

async fn start(server: &Arc<Server>, load: Loading) -> Result<(), ServeError> {
    let loaded = tokio::task::spawn_blocking(load).await;
    let model = loaded.map_err(|error| ServeError::Load(error.to_string()))?.map_err(ServeError::Load)?;
    server.model.get_or_init(|| model);
    server.life.advance(State::Warming);
    if let Some(wanted) = &server.config.warmup {
        warmup::run(server, wanted).await.map_err(ServeError::Warmup)?;
    }
    server.life.advance(State::Ready);
    Ok(())
}

/// Lets requests in flight end; after the time for that, or at a second signal, they are cancelled.
async fn drain(server: &Server, terminate: &mut Signal, interrupt: &mut Signal) {
    server.life.advance(State::Draining);
    let Ok(model) = server.model() else { return };
    model.engine.drain();
    tokio::select! {
        _ = server.life.until_idle(server.config.shutdown_timeout) => {}
        () = either(terminate, interrupt) => {}
    }
    if server.life.active() > 0 {
        model.engine.cancel_all();
        server.life.until_idle(LINGER).await;
    }
}

async fn accept(
    server: Arc<Server>,
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    mut stopped: tokio::sync::oneshot::Receiver<()>,
) {
    let router = router::router(&server);
    let places = Arc::new(Semaphore::new(server.config.max_connections));
    let graceful = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut stopped => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Usually too many open files: others must close first.
                tracing::warn!(%error, "a connection can't be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tracing::warn!(limit = server.config.max_connections, "too many connections: one is closed");
            drop(stream);
            continue;
        };
        // Tokens are small and must not wait for more. Fails only if the peer is gone already.
        let _ = stream.set_nodelay(true);
        let (server, router, tls, watcher) = (Arc::clone(&server), router.clone(), tls.clone(), graceful.watcher());
        tokio::spawn(async move {
            server.metrics.connections(1);
            connection(&server, stream, router, tls, watcher).await;
            server.metrics.connections(-1);
            drop(place);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(LINGER, graceful.shutdown()).await;
}

async fn connection(
    server: &Server,
    stream: TcpStream,
    router: Router,
    tls: Option<TlsAcceptor>,
    watcher: hyper_util::server::graceful::Watcher,
) {
    let local = stream.local_addr().ok().map(|address| LocalAddress(address.ip()));
    match tls {
        None => answer(server, stream, local, router, watcher).await,
        Some(tls) => match tokio::time::timeout(server.config.header_timeout, tls.accept(stream)).await {
            Ok(Ok(stream)) => answer(server, stream, local, router, watcher).await,
            Ok(Err(error)) => tracing::debug!(%error, "no TLS connection"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        },
    }
}

async fn answer(
    server: &Server,
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    local: Option<LocalAddress>,
    router: Router,
    watcher: hyper_util::server::graceful::Watcher,
) {
    let service = service_fn(move |mut request: Request<Incoming>| {
        let router = router.clone();
        if let Some(local) = local {
            request.extensions_mut().insert(local);
        }
        async move {
            Ok::<_, Infallible>(router.oneshot(request.map(Body::new)).await.unwrap_or_else(|never| match never {}))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(server.config.header_timeout)
        .max_buf_size(server.config.max_header_bytes.max(8 << 10))
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection ended");
    }
}
