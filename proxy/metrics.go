package proxy

import (
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the router's own, in a registry of their own.
type metrics struct {
	registry  *prometheus.Registry
	requests  *prometheus.CounterVec
	seconds   *prometheus.HistogramVec
	firstByte prometheus.Histogram
	prefill   prometheus.Histogram
	handOver  prometheus.Histogram
	retries   *prometheus.CounterVec
	noParams  prometheus.Counter
	refusals  prometheus.Counter
	fallbacks prometheus.Counter
	short     prometheus.Counter

	computed, computedTokens *prometheus.CounterVec
}

// buckets in seconds: from a router without engines' time to long generations.
var buckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}

func newMetrics(p *Proxy) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvconn_proxy_requests_total",
			Help: "Completion requests that ended, by endpoint and by HTTP status, client_gone or broken_off."}, []string{"endpoint", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "kvconn_proxy_request_seconds", Buckets: buckets,
			Help: "From a completion request's arrival to its end."}, []string{"endpoint"}),
		firstByte: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "kvconn_proxy_first_byte_seconds", Buckets: buckets,
			Help: "From a completion request's arrival to the first bytes of the decode server's answer, retries included."}),
		prefill: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "kvconn_proxy_prefill_seconds", Buckets: buckets,
			Help: "Time from a request to a prefill server until its answer."}),
		handOver: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "kvconn_proxy_hand_over_seconds", Buckets: buckets,
			Help: "From a prefill server's answer, which has the first token, to the decode server's first token, of requests that stream."}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvconn_proxy_retries_total",
			Help: "Failed attempts that the router repeated with another engine, by the role of the engine that failed."}, []string{"role"}),
		noParams: prometheus.NewCounter(prometheus.CounterOpts{Name: "kvconn_proxy_prefills_without_params_total",
			Help: "Prefills whose answer had no kv_transfer_params, so that the decode server computed the prompt itself (nixl contract)."}),
		refusals: prometheus.NewCounter(prometheus.CounterOpts{Name: "kvconn_proxy_prefill_refusals_total",
			Help: "Prefills whose answer was that there is nothing to load (kvconn_error); the decode server fails such a request or computes it."}),
		fallbacks: prometheus.NewCounter(prometheus.CounterOpts{Name: "kvconn_proxy_fallbacks_total",
			Help: "Attempts in which a decode server got a request alone, since no prefill server could serve it (--fallback-decode)."}),
	}
	m.short = prometheus.NewCounter(prometheus.CounterOpts{Name: "kvconn_proxy_short_requests_total",
		Help: "Requests that a decode server got alone, since they are smaller than --decode-below."})
	m.computed = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvconn_proxy_computed_prompts_total",
		Help: "Requests whose prompt a decode server computed in a prefill server's place, by reason, and by whether an answer said how many tokens the prompt has."}, []string{"reason", "tokens"})
	m.computedTokens = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvconn_proxy_computed_tokens_total",
		Help: "Tokens of these prompts, as the engines' answers say, by reason."}, []string{"reason"})
	for _, reason := range []string{fellBack, belowLimit, withoutParams, wasRefused} { // so that a rate sees the first one
		m.computedTokens.WithLabelValues(reason)
		for _, known := range []string{tokensKnown, tokensUnknown} {
			m.computed.WithLabelValues(reason, known)
		}
	}
	m.registry.MustRegister(m.computed, m.computedTokens, m.short, m.requests, m.seconds, m.firstByte, m.prefill, m.handOver, m.retries, m.noParams, m.refusals, m.fallbacks,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvconn_proxy_requests_in_flight",
			Help: "Completion requests under way."}, func() float64 { return float64(len(p.places)) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvconn_proxy_request_bytes",
			Help: "Memory that counts for requests under way, their headers and bodies, and for answers that are held whole: see --body-memory."}, func() float64 { return float64(p.bodies.held()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvconn_proxy_bodies_refused_total",
			Help: "Requests and bodies that were refused or had to give way, and answers that were refused, since there was no room for them in --body-memory."}, func() float64 { return float64(p.bodies.refused.Load()) }),
		serverCollector{&p.balancer})
	return m
}

// serverCollector reads the servers' state when it is asked.
type serverCollector struct{ b *balancer }

var (
	upDesc = prometheus.NewDesc("kvconn_proxy_server_up",
		"1 while the server's probes succeed. A server that is given in both roles is there in the role that it has, or had last.",
		[]string{"role", "url"}, nil)
	rankDesc = prometheus.NewDesc("kvconn_proxy_server_ranks", "Data parallel ranks known of the server.", []string{"role", "url"}, nil)
	loadDesc = prometheus.NewDesc("kvconn_proxy_server_load", "The server's load as least-loaded counts it: requests under way at a decode server, and at a prefill server each with 1 more for each KiB.", []string{"role", "url"}, nil)
)

// Describe is of prometheus.Collector.
func (c serverCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- upDesc
	ch <- rankDesc
	ch <- loadDesc
}

// Collect is of prometheus.Collector.
func (c serverCollector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range c.b.servers() {
		if s.inOtherRole() {
			continue
		}
		_, up, _, ranks := s.state()
		isUp := 0.0
		if up {
			isUp = 1
		}
		ch <- prometheus.MustNewConstMetric(upDesc, prometheus.GaugeValue, isUp, s.role, s.url)
		ch <- prometheus.MustNewConstMetric(rankDesc, prometheus.GaugeValue, float64(len(ranks)), s.role, s.url)
		ch <- prometheus.MustNewConstMetric(loadDesc, prometheus.GaugeValue, float64(s.inFlight()), s.role, s.url)
	}
}
