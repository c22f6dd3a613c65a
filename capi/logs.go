// Log records wait in a ring until the host reads them. If the host does not, the oldest are lost.

package main

// #include <stddef.h>
// #include <stdint.h>
import "C"

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
)

// maxLogs bounds the ring: a host that does not read loses the oldest.
const maxLogs = 1024

// maxStack keeps the record of a panic within a reader's buffer.
const maxStack = 8 << 10

// logs is the ring of the whole library.
var logs logRing

type logRing struct {
	mu      sync.Mutex
	records [][]byte
	lost    int
	fd      int // eventfd, readable while there are records; 0: not made yet
}

// Write implements zapcore.WriteSyncer: one call, one record.
func (l *logRing) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.records) == maxLogs {
		l.records = l.records[1:]
		l.lost++
	}
	l.records = append(l.records, append([]byte(nil), b...))
	if len(l.records) == 1 && l.fd > 0 {
		_, _ = unix.Write(l.fd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	return len(b), nil
}

// Sync implements zapcore.WriteSyncer.
func (l *logRing) Sync() error { return nil }

func (l *logRing) logger(level string) *zap.Logger {
	lvl, err := zapcore.ParseLevel(level)
	if err != nil {
		lvl = zap.InfoLevel
	}
	enc := zapcore.NewJSONEncoder(zapcore.EncoderConfig{
		TimeKey: "time", LevelKey: "level", NameKey: "logger", MessageKey: "msg",
		EncodeTime: zapcore.EpochTimeEncoder, EncodeLevel: zapcore.LowercaseLevelEncoder, EncodeDuration: zapcore.SecondsDurationEncoder,
		LineEnding: zapcore.DefaultLineEnding,
	})
	return zap.New(zapcore.NewCore(enc, l, lvl))
}

func (l *logRing) panicked(where string, cause any, stack []byte) {
	if len(stack) > maxStack {
		stack = stack[:maxStack]
	}
	b, err := json.Marshal(map[string]any{"level": "error", "time": float64(time.Now().UnixMicro()) / 1e6, "msg": "panic contained",
		"where": where, "cause": fmt.Sprint(cause), "stack": string(stack)})
	if err == nil {
		_, _ = l.Write(b)
	}
}

func (l *logRing) event() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fd == 0 {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return -1
		}
		l.fd = fd
		if len(l.records) > 0 {
			_, _ = unix.Write(fd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		}
	}
	return l.fd
}

func (l *logRing) next() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.records) == 0 {
		return nil
	}
	if l.lost > 0 {
		n := l.lost
		l.lost = 0
		b, _ := json.Marshal(map[string]any{"level": "warn", "msg": "log records were dropped", "count": n})
		return b
	}
	b := l.records[0]
	l.records = l.records[1:]
	if len(l.records) == 0 && l.fd > 0 {
		var buf [8]byte
		_, _ = unix.Read(l.fd, buf[:])
	}
	return b
}

//export go_log_fd
func go_log_fd() C.int32_t {
	fd := logs.event()
	if fd < 0 {
		return -C.int32_t(11) // KVCONN_ERR_SYSTEM
	}
	return C.int32_t(fd)
}

//export go_next_log
func go_next_log(buf *C.char, capacity C.size_t) C.int32_t {
	b := logs.next()
	if len(b) == 0 {
		return 0
	}
	if uint64(len(b)) >= uint64(capacity) {
		b, _ = json.Marshal(map[string]any{"level": "warn", "msg": fmt.Sprintf("a log record of %d bytes did not fit the caller's buffer of %d", len(b), capacity)})
		b = b[:min(len(b), int(capacity)-1)]
	}
	dst := unsafe.Slice((*byte)(unsafe.Pointer(buf)), len(b)+1)
	copy(dst, b)
	dst[len(b)] = 0
	return C.int32_t(len(b))
}
