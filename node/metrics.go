package node

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvconn/kvconn/core"
)

// metrics is GET /metrics of the bootstrap port, for engines that have no page of
// their own. It shows Stats, and how long halves took. An agent without a bootstrap port has
// a nil *metrics, on which observe may be called.
type metrics struct {
	stats     func() Stats
	registry  *prometheus.Registry
	wait      *prometheus.HistogramVec
	transfer  *prometheus.HistogramVec
	described map[string]*prometheus.Desc
}

// seconds are the buckets of durations: from a step of an engine up to a lease.
var seconds = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120}

// scrapeBound bounds the time that a client takes to read the page.
const scrapeBound = 10 * time.Second

func newMetrics(c *Config, stats func() Stats) *metrics {
	rank := prometheus.Labels{"engine_id": c.EngineID, "dp_rank": strconv.Itoa(c.DPRank), "tp_rank": strconv.Itoa(c.TPRank), "pp_rank": strconv.Itoa(c.PPRank)}
	m := &metrics{stats: stats, registry: prometheus.NewRegistry(), described: map[string]*prometheus.Desc{}}
	histogram := func(name, help string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: rank, Buckets: seconds}, []string{"side"})
		m.registry.MustRegister(h)
		return h
	}
	m.wait = histogram("kvconn_wait_seconds", "Of halves that ended well: of a load the rest of its time, without the transfer, of an offer until the sending begins.")
	m.transfer = histogram("kvconn_transfer_seconds", "How long bytes were under way, of halves that ended well.")
	for _, d := range described {
		m.described[d.name] = prometheus.NewDesc(d.name, d.help, d.labels, rank)
	}
	m.registry.MustRegister(m)
	return m
}

// described are the metrics that are read from Stats.
var described = []struct {
	name, help string
	labels     []string
}{
	{"kvconn_loads_total", "Loads that ended, by result.", []string{"result"}},
	{"kvconn_offers_total", "Offers that ended, by result.", []string{"result"}},
	{"kvconn_calls_total", "Accepted calls of the engine: offers, loads, claims.", []string{"call"}},
	{"kvconn_bytes_total", "Bytes of KV cache moved, by transport.", []string{"transport", "direction"}},
	{"kvconn_transport_available", "Whether a transport can be used.", []string{"transport"}},
	{"kvconn_transport_counters", "A transport's own counters: of rdma its writes, doorbells and signalled completions since the start, and its lanes.", []string{"transport", "counter"}},
	{"kvconn_fallbacks_total", "Loads that went by another transport than this better one, by the kind of the reason.", []string{"transport", "reason"}},
	{"kvconn_claims_lost_total", "Claims of which the engine was told that a load could only fail.", nil},
	{"kvconn_expired_early_total", "Claims and loads of requests that this engine never named.", nil},
	{"kvconn_partial_offers_total", "Offers that began to move while the engine still worked on their requests.", nil},
	{"kvconn_partial_offers_bytes_total", "Bytes that were given to the transport while the engine still worked on their requests.", nil},
	{"kvconn_withdrawn_total", "Offers that began to move early and whose blocks the engine took back, as when it preempts a request.", nil},
	{"kvconn_retries_total", "Requests sent again, and peers looked up again.", nil},
	{"kvconn_cluster_refused_total", "Messages over a NATS cluster that were not taken, by reason.", []string{"reason"}},
	{"kvconn_under_way", "Halves under way, by state.", []string{"side", "state"}},
	{"kvconn_uncollected", "Halves that ended and that the engine has not collected.", nil},
	{"kvconn_oldest_wait_seconds", "The age of the oldest half under way.", nil},
}

// observe takes a half's end.
func (m *metrics) observe(r core.Report) {
	if m == nil || r.Code != core.OK || r.Stats.Bytes == 0 {
		return
	}
	m.wait.WithLabelValues(r.Side.String()).Observe(r.Wait.Seconds())
	m.transfer.WithLabelValues(r.Side.String()).Observe(time.Duration(r.Stats.Nanos).Seconds())
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(out chan<- *prometheus.Desc) {
	for _, d := range m.described {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	s := m.stats()
	counter := func(name string, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(m.described[name], prometheus.CounterValue, float64(v), labels...)
	}
	gauge := func(name string, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(m.described[name], prometheus.GaugeValue, v, labels...)
	}
	counter("kvconn_loads_total", s.Loads, core.OK.String())
	for code, n := range s.LoadsBy {
		counter("kvconn_loads_total", n, code)
	}
	counter("kvconn_offers_total", s.Offers, core.OK.String())
	for code, n := range s.OffersBy {
		counter("kvconn_offers_total", n, code)
	}
	counter("kvconn_calls_total", s.Offered, "offer")
	counter("kvconn_calls_total", s.LoadsStarted, "load")
	counter("kvconn_calls_total", s.Claimed, "claim")
	for name, t := range s.Transports {
		counter("kvconn_bytes_total", t.BytesIn, name, "in")
		counter("kvconn_bytes_total", t.BytesOut, name, "out")
		available := 0.0
		if t.Available {
			available = 1
		}
		gauge("kvconn_transport_available", available, name)
		for _, why := range core.Whys() {
			counter("kvconn_fallbacks_total", t.FallbacksBy[why], name, string(why))
		}
		for c, n := range t.Counters {
			gauge("kvconn_transport_counters", float64(n), name, c)
		}
	}
	counter("kvconn_claims_lost_total", s.ClaimsLost)
	counter("kvconn_expired_early_total", s.ExpiredEarly)
	counter("kvconn_partial_offers_total", s.Partial)
	counter("kvconn_partial_offers_bytes_total", s.BytesPartial)
	counter("kvconn_withdrawn_total", s.Withdrawn)
	counter("kvconn_retries_total", s.Retries)
	for reason, n := range s.ClusterRefused {
		counter("kvconn_cluster_refused_total", n, reason)
	}
	gauge("kvconn_under_way", float64(s.LoadsClaimed), "load", "claimed")
	gauge("kvconn_under_way", float64(s.LoadsWaiting), "load", "waiting")
	gauge("kvconn_under_way", float64(s.LoadsUnderWay-s.LoadsClaimed-s.LoadsWaiting), "load", "other")
	gauge("kvconn_under_way", float64(s.OffersEarly), "offer", "early")
	gauge("kvconn_under_way", float64(s.OffersUnderWay-s.OffersEarly), "offer", "known")
	gauge("kvconn_uncollected", float64(s.Unread))
	gauge("kvconn_oldest_wait_seconds", s.OldestWait)
}

// handler serves the page.
func (m *metrics) handler() http.Handler {
	page := promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, ErrorHandling: promhttp.HTTPErrorOnError})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		_ = c.SetReadDeadline(time.Now().Add(scrapeBound))
		_ = c.SetWriteDeadline(time.Now().Add(scrapeBound))
		page.ServeHTTP(w, r)
	})
}
