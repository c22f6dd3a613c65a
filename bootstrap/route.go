// The routes of SGLang's bootstrap server as of SGLang 0.5.23: /route,
// /register_dp_rank, /query_dp_ranks.

package bootstrap

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// MaxQuery is the largest body of POST /query_dp_ranks: 1,024 rooms of 19 digits, and half as
// much again. Strangers may ask, so all connections together hold 32 MiB of such bodies.
const MaxQuery = 32 << 10

// decodeRank reads the body of PUT /route.
func decodeRank(body []byte) (r Rank, err error) {
	o, err := readObject(body)
	if err != nil {
		return r, err
	}
	r.Host, r.Port = o.text("rank_ip"), o.number("rank_port")
	r.Sizes = Sizes{o.number("attn_dp_size"), o.number("attn_cp_size"), o.number("attn_tp_size"), o.number("pp_size")}
	r.Place = Place{o.number("attn_dp_rank"), o.number("attn_cp_rank"), o.number("attn_tp_rank"), o.number("pp_rank")}
	dp := "attn_dp_rank"
	// Data parallelism is either that of attention, or that of whole engines.
	if n, i := o.number("system_dp_size"), o.number("system_dp_rank"); n != 1 {
		r.Sizes.DP, r.Place.DP, dp = n, i, "system_dp_rank"
	}
	r.Info = o.info()
	if err := o.err(); err != nil {
		return r, err
	}
	if bad := r.check([4]string{dp, "attn_cp_rank", "attn_tp_rank", "pp_rank"}); bad != nil {
		return r, &InvalidError{Fields: bad}
	}
	return r, nil
}

// info reads the members of the engine's topology from a rank's registration.
func (o *object) info() map[string]json.RawMessage {
	pages := o.number("page_size")
	if _, ok := o.fields["page_size"]; ok && o.bad == nil && pages < 1 {
		o.bad = append(o.bad, fieldError("value_error", "page_size", "%d is not a size of pages", pages))
	}
	out := map[string]json.RawMessage{}
	follow := true
	if o.has("load_balance_method") {
		follow = o.text("load_balance_method") == "follow_bootstrap_room"
	}
	out["follow_bootstrap_room"], _ = json.Marshal(follow)
	for _, key := range []string{"page_size", "kv_cache_dtype", "prefill_http_port", "enable_dsa_cache_layer_split", "enable_kv_cache_sharding", "decode_allocation_policy"} {
		if raw, ok := o.fields[key]; ok {
			out[key] = raw
		}
	}
	for _, key := range []string{"kv_layout", "dsv41_spec_layout"} { // an engine without them says nothing
		if o.has(key) {
			out[key] = o.fields[key]
		}
	}
	return out
}

// topology is the answer to GET /route with -1 for all ranks.
func (r Rank) topology() map[string]any {
	all := map[string]any{"page_size": nil, "kv_cache_dtype": nil, "follow_bootstrap_room": true}
	for key, v := range r.Info {
		all[key] = v
	}
	all["attn_tp_size"], all["attn_cp_size"], all["dp_size"], all["pp_size"] = r.Sizes.TP, r.Sizes.CP, r.Sizes.DP, r.Sizes.PP
	return all
}

func putRoute(t *Routes, w http.ResponseWriter, r *http.Request) {
	body, ok := readBody(w, r, MaxBody)
	if !ok {
		return
	}
	rank, err := decodeRank(body)
	if err == nil {
		err = t.put(rank)
	}
	done(w, err)
}

// getRoute answers for one rank, or for the topology when all numbers are -1.
func getRoute(t *Routes, w http.ResponseWriter, r *http.Request) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		fail(w, http.StatusBadRequest, "the query cannot be read: "+err.Error())
		return
	}
	names := [4]string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"}
	var n [4]int
	for i, name := range names {
		if n[i], err = strconv.Atoi(q.Get(name)); err != nil {
			fail(w, http.StatusBadRequest, fmt.Sprintf("%s is %q in the query, a rank or -1 is wanted; give %s", name, excerpt([]byte(q.Get(name))), strings.Join(names[:], ", ")))
			return
		}
	}
	first, err := t.Topology()
	switch {
	case err != nil:
		done(w, err)
		return
	case n == [4]int{-1, -1, -1, -1}:
		answer(w, http.StatusOK, first.topology())
		return
	}
	rank, err := t.Rank(Place{n[0], n[1], n[2], n[3]})
	if err != nil {
		done(w, err)
		return
	}
	answer(w, http.StatusOK, map[string]any{"rank_ip": rank.Host, "rank_port": rank.Port})
}

// readFields reads a request's body as an object. If it is not ok, readFields has answered why.
func readFields(w http.ResponseWriter, r *http.Request, most int64) (*object, bool) {
	body, ok := readBody(w, r, most)
	if !ok {
		return nil, false
	}
	o, err := readObject(body)
	if err != nil {
		done(w, err)
	}
	return o, err == nil
}

func registerDPRank(t *Routes, w http.ResponseWriter, r *http.Request) {
	o, ok := readFields(w, r, MaxBody)
	if !ok {
		return
	}
	var id int64
	o.take("bootstrap_room", &id, "int_type", "integer")
	dp := o.number("dp_rank")
	if o.bad == nil && id < 0 {
		o.bad = append(o.bad, fieldError("value_error", "bootstrap_room", "%d is not a room, give one from 0 to 2^63-1", id))
	}
	err := o.err()
	if err == nil {
		err = t.enter(id, dp, addressOf(r))
	}
	done(w, err)
}

func queryDPRanks(t *Routes, w http.ResponseWriter, r *http.Request) {
	o, ok := readFields(w, r, MaxQuery)
	if !ok {
		return
	}
	var ids []int64
	if o.take("bootstrap_rooms", &ids, "list_type", "list of integers"); o.bad != nil {
		done(w, o.err())
		return
	}
	answer(w, http.StatusOK, t.dpRanks(ids))
}
