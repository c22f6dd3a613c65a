// The registry may be that of a host which a client has named. So each answer is one message, and this agent
// keeps no more of a list than it has asked for.

package natsbus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/internal/fault"
)

// The status of a direct get that finds nothing.
const (
	statusHeader = "Status"
	notFound     = "404"
)

// read returns the entry under a key. Any replica may answer, so read asks the stream's leader only if
// nobody answers.
func (l *link) read(ctx context.Context, key string) (record, error) {
	var err error
	for range 2 { // the stream may have been made between the two queries
		var m *nats.Msg
		if m, err = l.nc.RequestWithContext(ctx, l.bus.opt.JSPrefix+".DIRECT.GET."+stream+"."+key, nil); err == nil {
			return directRecord(m, key)
		}
		if !errors.Is(err, nats.ErrNoResponders) {
			return record{}, err
		}
		info, why := l.streamInfo(ctx, "", 0)
		switch {
		case errors.Is(why, jetstream.ErrStreamNotFound):
			return record{}, nil
		case why != nil:
			return record{}, why
		case !info.Config.AllowDirect:
			return record{}, fmt.Errorf("stream %s does not allow direct gets: no kvconn agent made it so; set its allow_direct, or delete it", stream)
		}
	}
	return record{}, err
}

// directRecord is the answer to a direct get.
func directRecord(m *nats.Msg, key string) (record, error) {
	if status := m.Header.Get(statusHeader); len(m.Data) == 0 && status != "" {
		if status == notFound {
			return record{}, nil
		}
		return record{}, fmt.Errorf("it answers %.20q to a read of %.300s: %.300q", status, keyName(key), m.Header.Get("Description"))
	}
	seq, err := strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
	if err != nil {
		return record{}, fmt.Errorf("its answer to a read of %.300s has no sequence: %w", keyName(key), err)
	}
	return recordOf(seq, m.Header, m.Data, key)
}

// list asks the stream's leader for the keys under a filter, and returns the first ones of them. Keys whose
// entries have just ended are among them.
func (l *link) list(ctx context.Context, filter string, most int) ([]string, error) {
	info, err := l.streamInfo(ctx, filter, most)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	keys := info.State.Subjects.keys
	slices.Sort(keys)
	return keys, nil
}

// streamInfo is what is read of JetStream's answer about the registry's stream.
type streamInfo struct {
	Error  *jetstream.APIError `json:"error"`
	Config struct {
		AllowDirect bool `json:"allow_direct"`
	} `json:"config"`
	State struct {
		Subjects keyList `json:"subjects"`
	} `json:"state"`
}

// streamInfo asks the leader about the stream, with the first keys under a filter unless that is "". It asks for one
// page of them: a server tells up to 100,000 in one.
func (l *link) streamInfo(ctx context.Context, filter string, most int) (*streamInfo, error) {
	var ask []byte
	if filter != "" {
		var err error
		if ask, err = json.Marshal(map[string]string{"subjects_filter": filter}); err != nil {
			return nil, err
		}
	}
	m, err := l.nc.RequestWithContext(ctx, l.bus.opt.JSPrefix+".STREAM.INFO."+stream, ask)
	if err != nil {
		return nil, err
	}
	return streamInfoOf(m.Data, most)
}

func streamInfoOf(answer []byte, most int) (*streamInfo, error) {
	info := new(streamInfo)
	info.State.Subjects.most = most
	if err := json.Unmarshal(answer, info); err != nil {
		return nil, fmt.Errorf("its answer about stream %s: %w", stream, err)
	}
	switch {
	case info.Error == nil:
		return info, nil
	case info.Error.ErrorCode == jetstream.JSErrCodeStreamNotFound:
		return nil, jetstream.ErrStreamNotFound
	}
	info.Error.Description = fmt.Sprintf("%.300s", info.Error.Description)
	return nil, info.Error
}

// keyList has the first keys of a JSON object, and ignores the rest of the object.
type keyList struct {
	most int
	keys []string
	read bool
}

func (f *keyList) UnmarshalJSON(b []byte) error {
	if f.read {
		return errors.New("it has two lists of subjects")
	}
	f.read = true
	d := json.NewDecoder(bytes.NewReader(b))
	if open, err := d.Token(); err != nil || open != json.Delim('{') { // null: nothing is under the filter
		return err
	}
	for (len(f.keys) < f.most || fault.On("bus-keeps-all-keys")) && d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		var n uint64 // messages under the key
		if err := d.Decode(&n); err != nil {
			return err
		}
		f.keys = append(f.keys, key.(string)) // as JSON wants it
	}
	return nil
}
