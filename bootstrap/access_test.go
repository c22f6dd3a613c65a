package bootstrap

import (
	"io"
	"net/http/httptest"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// untouched fails when somebody reads a refused request's body.
type untouched struct{ t *testing.T }

func (u untouched) Read([]byte) (int, error) {
	u.t.Error("the body of a refused request is read")
	return 0, io.ErrUnexpectedEOF
}

func TestAccess(t *testing.T) {
	leaktest.Check(t)
	for name, c := range map[string]struct {
		access *Access
		header string
		want   int
	}{
		"open":              {nil, "", 200},
		"open, with one":    {&Access{}, "Bearer x", 200},
		"right":             {&Access{Token: "secret"}, "Bearer secret", 200},
		"scheme's case":     {&Access{Token: "secret"}, "bearer secret", 200},
		"none":              {&Access{Token: "secret"}, "", 401},
		"wrong":             {&Access{Token: "secret"}, "Bearer secreT", 401},
		"longer":            {&Access{Token: "secret"}, "Bearer secret2", 401},
		"empty":             {&Access{Token: "secret"}, "Bearer ", 401},
		"basic":             {&Access{Token: "secret"}, "Basic secret", 401},
		"closed":            {&Access{Closed: true}, "", 401},
		"closed, empty":     {&Access{Closed: true}, "Bearer ", 401},
		"closed with token": {&Access{Token: "secret", Closed: true}, "Bearer secret", 200},
	} {
		core, logs := observer.New(zap.WarnLevel)
		if c.access != nil {
			c.access.Logger = zap.New(core)
		}
		table := new(Table)
		h := NewHandler(table, c.access, nil)
		r := httptest.NewRequest("POST", "/register", strings.NewReader(good))
		if c.want == 401 {
			r = httptest.NewRequest("POST", "/register", untouched{t})
		}
		if c.header != "" {
			r.Header.Set("Authorization", c.header)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != c.want {
			t.Errorf("%s: %d %s, want %d", name, w.Code, w.Body, c.want)
		}
		refused := 0
		if c.want == 401 {
			refused = 1
			if !strings.HasPrefix(w.Body.String(), `{"detail":"`) || w.Header().Get("WWW-Authenticate") != "Bearer" {
				t.Errorf("%s: %v %s", name, w.Header(), w.Body)
			}
			if strings.Contains(w.Body.String(), "secret") {
				t.Errorf("%s: the answer tells the token", name)
			}
		}
		if len(table.Query()) != 1-refused {
			t.Errorf("%s: the table holds %v", name, table.Query())
		}
		if n := logs.FilterField(zap.String("remote", r.RemoteAddr)).Len(); n != refused {
			t.Errorf("%s: %d log lines name %s: %v", name, n, r.RemoteAddr, logs.All())
		}
		for _, path := range []string{"/query", "/health"} {
			if code, body := do(t, h, "GET", path, ""); code != 200 {
				t.Errorf("%s: GET %s: %d %s", name, path, code, body)
			}
		}
	}
}
