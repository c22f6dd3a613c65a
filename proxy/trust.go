// By which authority the router checks the bootstrap ports that it asks by https.

package proxy

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// SystemCA is the value of Config.BootstrapCA that stands for the system's authorities.
const SystemCA = "system"

// bootstrapTrust reads the authority of the bootstrap ports; nil means the
// system's.
func bootstrapTrust(ca string) (*tls.Config, error) {
	if ca == "" || ca == SystemCA {
		return nil, nil
	}
	text, err := os.ReadFile(ca)
	if err != nil {
		return nil, fmt.Errorf("proxy: --bootstrap-ca: %w", err)
	}
	trust := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if !trust.RootCAs.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("proxy: --bootstrap-ca %s: no certificate in PEM form; give the authority's file, or %q", ca, SystemCA)
	}
	return trust, nil
}
