package bootstrap

import (
	"crypto/subtle"
	"net/http"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/ratelog"
)

// Access decides which requests may use the routes that change something. The zero
// value lets all of them do so.
type Access struct {
	// Token must be in the header "Authorization: Bearer TOKEN".
	Token string
	// Closed refuses all requests if there is no token.
	Closed bool
	// Logger gets a line with the address of each client that is refused; it may be nil.
	Logger *zap.Logger

	refused ratelog.Limit
}

// Wrap returns a handler that answers 401 before it reads a request's body,
// unless the request may go on to h. The methods that change nothing pass.
func (a *Access) Wrap(h http.Handler) http.Handler {
	if a == nil || a.Token == "" && !a.Closed {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet || r.Method == http.MethodHead || a.admits(r) {
			h.ServeHTTP(w, r)
			return
		}
		if a.Logger != nil {
			a.refused.Do(func(note string) {
				a.Logger.Warn("HTTP request without the token is refused"+note, zap.String("remote", r.RemoteAddr),
					zap.String("method", r.Method), zap.String("path", r.URL.Path))
			})
		}
		deadline(w, time.Now().Add(exchange))
		w.Header().Set("WWW-Authenticate", "Bearer")
		w.Header().Set("Connection", "close")
		detail := "this route wants the header \"Authorization: Bearer TOKEN\" with the prefill engine's nats_token"
		if a.Token == "" {
			detail = "this route is closed: the prefill engine admits nkeys only, and has no nats_token"
		}
		fail(w, http.StatusUnauthorized, detail)
	})
}

func (a *Access) admits(r *http.Request) bool {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return a.Token != "" && strings.EqualFold(scheme, "Bearer") &&
		subtle.ConstantTimeCompare([]byte(strings.TrimSpace(token)), []byte(a.Token)) == 1
}
