package verbs

import "strconv"

func (s Status) String() string {
	names := [...]string{"success", "local length error", "local queue pair operation error", "local EE context operation error",
		"local protection error", "flushed: the queue pair is in error", "memory window bind error", "bad response", "local access error",
		"remote invalid request", "remote access error: wrong key or range", "remote operation error",
		"retries exceeded: the peer does not answer", "RNR retries exceeded: the peer has no receive posted", "local RDD violation",
		"remote invalid read request", "remote aborted", "invalid EE context number", "invalid EE context state", "fatal error",
		"response timeout", "general error", "tag matching error", "tag matching rendezvous incomplete"}
	text := "unknown"
	if int(s) < len(names) {
		text = names[s]
	}
	return text + " (status " + strconv.Itoa(int(s)) + ")"
}
