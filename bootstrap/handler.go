// The port's routes are served, and each exchange with a client has a bound.

package bootstrap

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/kvconn/kvconn/internal/quota"
)

// MaxBody is the largest body of POST /register.
const MaxBody = 64 << 10

// exchange bounds the reading of a body and the writing of an answer, so that a peer
// that does neither keeps no goroutine. It holds for the table's routes only, since
// the handlers of extra may stream.
const exchange = 10 * time.Second

// NewHandler serves t at /register, /query and /health, its Routes at SGLang's
// /route, /register_dp_rank and /query_dp_ranks, and the handlers of extra at their
// http.ServeMux patterns. Access guards the routes that change something; nil lets
// all requests pass. The caller wraps the handlers of extra itself. A pattern in extra
// that is malformed or taken panics, as in http.ServeMux: it is a fault of the program.
func NewHandler(t *Table, access *Access, extra map[string]http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/register", access.Wrap(route(func(w http.ResponseWriter, r *http.Request) { register(t, w, r) }, http.MethodPost)))
	mux.Handle("/query", route(func(w http.ResponseWriter, _ *http.Request) {
		c := http.NewResponseController(w)
		a, err := t.startAnswer(c)
		if err != nil { // engines are strings and ints
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		defer t.endAnswer(a, c)
		write(w, http.StatusOK, a.text)
	}, http.MethodGet, http.MethodHead))
	mux.Handle("/health", route(func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, statusOK)
	}, http.MethodGet, http.MethodHead))
	routes := t.Routes()
	mux.Handle("/route", access.Wrap(route(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			putRoute(routes, w, r)
			return
		}
		getRoute(routes, w, r)
	}, http.MethodGet, http.MethodHead, http.MethodPut)))
	mux.Handle("/register_dp_rank", access.Wrap(route(func(w http.ResponseWriter, r *http.Request) { registerDPRank(routes, w, r) }, http.MethodPost)))
	mux.Handle("/query_dp_ranks", route(func(w http.ResponseWriter, r *http.Request) { queryDPRanks(routes, w, r) }, http.MethodPost)) // it changes nothing
	for pattern, h := range extra {
		mux.Handle(pattern, unbounded(h))
	}
	if extra["/"] == nil {
		mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			fail(w, http.StatusNotFound, "Not Found")
		})
	}
	return unread(mux)
}

// unread ends a connection if the request's body is not read to its end when the
// answer is written: net/http would wait for the rest, without a bound.
func unread(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			w.Header().Set("Connection", "close") // readBody takes it away
			body := &tracked{ReadCloser: r.Body}
			r.Body = body
			defer func() {
				if !body.ended {
					_ = http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0))
				}
			}()
		}
		h.ServeHTTP(w, r)
	})
}

// tracked knows whether a body was read to its end.
type tracked struct {
	io.ReadCloser
	ended bool
}

func (t *tracked) Read(b []byte) (int, error) {
	n, err := t.ReadCloser.Read(b)
	t.ended = t.ended || err == io.EOF
	return n, err
}

var statusOK = map[string]string{"status": "ok"}

// route answers other methods with 405, in the shape of the other errors.
func route(h http.HandlerFunc, methods ...string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		deadline(w, time.Now().Add(exchange))
		for _, m := range methods {
			if r.Method == m {
				h(w, r)
				return
			}
		}
		w.Header()["Allow"] = methods
		fail(w, http.StatusMethodNotAllowed, "Method Not Allowed")
	})
}

// unbounded removes the write deadline of an earlier request on the same connection,
// which net/http does not reset.
func unbounded(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		deadline(w, time.Time{})
		h.ServeHTTP(w, r)
	})
}

// deadline bounds the exchange. A ResponseWriter without deadlines is not a
// connection, so that there is nothing to bound.
func deadline(w http.ResponseWriter, at time.Time) {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(at)
	_ = c.SetWriteDeadline(at)
}

// readBody reads all of a request's body, so that the connection may serve another
// request. If it is not ok, readBody has answered why.
func readBody(w http.ResponseWriter, r *http.Request, most int64) (body []byte, ok bool) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
	var tooLarge *http.MaxBytesError
	switch {
	case err == nil:
		w.Header().Del("Connection")
		return body, true
	case errors.As(err, &tooLarge):
		fail(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit))
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		fail(w, http.StatusRequestTimeout, fmt.Sprintf("the body did not arrive within %v", exchange))
	default:
		fail(w, http.StatusBadRequest, "the body cannot be read: "+err.Error())
	}
	return nil, false
}

func register(t *Table, w http.ResponseWriter, r *http.Request) {
	body, ok := readBody(w, r, MaxBody)
	if !ok {
		return
	}
	reg, err := decodeRegistration(body)
	if err == nil {
		err = t.tell(reg, addressOf(r))
	}
	done(w, err)
}

// addressOf is what a request's client counts under.
func addressOf(r *http.Request) netip.Prefix {
	ap, _ := netip.ParseAddrPort(r.RemoteAddr) // not an IP address: all of these are one
	return quota.Of(ap.Addr())
}

// done answers a request that was to change something.
func done(w http.ResponseWriter, err error) {
	var (
		invalid  *InvalidError
		conflict *ConflictError
		full     *FullError
		early    *NotReadyError
		unknown  *NotFoundError
	)
	switch {
	case err == nil:
		answer(w, http.StatusOK, statusOK)
	case errors.As(err, &invalid):
		fail(w, http.StatusUnprocessableEntity, invalid.Fields)
	case errors.As(err, &conflict):
		fail(w, http.StatusBadRequest, conflict.Detail)
	case errors.As(err, &full):
		fail(w, http.StatusServiceUnavailable, full.detail())
	case errors.As(err, &early):
		fail(w, http.StatusServiceUnavailable, early.detail())
	case errors.As(err, &unknown):
		fail(w, http.StatusNotFound, unknown.detail())
	default:
		fail(w, http.StatusInternalServerError, err.Error())
	}
}

// fail answers as FastAPI's HTTPException does.
func fail(w http.ResponseWriter, status int, detail any) {
	answer(w, status, map[string]any{"detail": detail})
}

func answer(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil { // the values above are strings, ints and maps of them
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	write(w, status, body)
}

func write(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(body) // an error means that the client has gone
}
